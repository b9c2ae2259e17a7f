"""Code that runs inside a sandbox: the zygote and the processes it forks. Standard library only.

The folder is run as a program (`python -I -S inside CONTROL_FD PLAN`), so its modules import one
another by their bare names.
"""
