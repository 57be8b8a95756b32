"""Losses of casts by layer and tensor class: measured on some steps, compared with thresholds, recorded, drawn.

    statistics.py     errors of one cast of a matrix, counted on its device (statistics_triton.py: the kernel)
    cast_monitor.py   all casts of a measured step, as figures by tensor class and site
    routing.py        router statistics of mixtures of experts on measured steps
    thresholds.py     which of them are worse than FP8's rounding explains
    records.py        a measurement as a line of metrics.jsonl and as named curves
    heat_maps.py      all measurements of a run as one picture

What is done about a layer that degrades, and the measuring of weights and gradients on the wire, is engine/health.py.
"""
