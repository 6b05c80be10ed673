"""What an administrator can set: the table of keys, the files that hold them, and what is said about both.

The daemon and the command line both need this, so it imports none of what only the daemon has.
"""
