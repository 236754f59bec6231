"""The command line: `python -m symjax_rewrite COMMAND`, or `symjax-rewrite COMMAND`.

`main` holds the table of commands. A command is a function of its arguments (a list of strings)
that returns an exit code. May import everything.
"""
