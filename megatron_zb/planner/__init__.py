"""From a model, a device and a number of GPUs to the schedule to train with.

``config`` reads the YAML files, ``work`` and ``footprint`` turn them into seconds and bytes of a
layer, ``strategy`` lists what can be chosen, ``prediction`` simulates one choice, ``search`` finds
the best of each schedule, ``table`` and ``flags`` tell the user. Needs neither torch nor Megatron.
"""
