"""Planner of the best schedule for a model, a device and a number of GPUs.

``model`` and ``device`` read the YAML files, ``work`` lists what a layer runs and its seconds,
``byte_counts`` its bytes, ``strategy`` and ``settings`` list the choices, ``prediction`` simulates
one choice, ``search`` finds the best of each schedule, ``from_profile`` does so with measured
costs, ``table`` presents its ``rows``. What a schedule may have beside F, B and W is a file of
``features``. Needs neither torch nor Megatron.
"""
