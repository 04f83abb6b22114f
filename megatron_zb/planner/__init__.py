"""Planner of the best schedule for a model, a device and a number of GPUs.

``model`` and ``device`` read the YAML files, ``work`` and ``byte_counts`` compute seconds and bytes
of a layer, ``strategy`` lists the choices, ``prediction`` simulates one choice, ``search`` finds
the best of each schedule, ``table`` and ``flags`` present it. Needs neither torch nor Megatron.
"""
