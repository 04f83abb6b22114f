"""Combinations of settings of the real pretrain_gpt.py: upstream's own schedule against ours.

settings.yaml has the settings; `space` reads it, `drawing` and `covering` choose combinations,
`command` writes what a user would type, `comparison` says how far numbers may differ, and `trial`
runs and judges one combination.
"""
