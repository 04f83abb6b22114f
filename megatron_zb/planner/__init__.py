"""Planner of the best schedule for a model, a device and a number of GPUs.

``model`` and ``device`` read the YAML files, ``operators`` lists what a layer runs, ``work`` and
``byte_counts`` derive its seconds and bytes, ``strategy`` and ``settings`` list the choices,
``prediction`` simulates one choice, ``search`` finds the best of each schedule, ``from_profile``
does so with measured costs, ``table`` and ``flags`` present it. Needs neither torch nor Megatron.
"""
