"""What the users' guides say can be typed, as tables: what is typed, what must happen.

The guides are the README of "VERL Mixed Agent Loop Training" and AgentFly's training guides: the
training guide, two training examples and tutorial 6.
"""
