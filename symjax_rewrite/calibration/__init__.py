"""Measurements of device profiles: each figure by small programs and a robust fit.

May import `cost` and the folders below. Before: a device profile. After: the figures that small
programs on this machine give, with residuals, as a profile file.

    python -m symjax_rewrite calibrate --save my_server.json
"""
