"""What runs inside a sandbox: the zygote, and what it becomes. Standard library only.

The folder is run as a program (`python -I -S inside CONTROL_FD PLAN`), so its modules import one
another by their bare names.
"""
