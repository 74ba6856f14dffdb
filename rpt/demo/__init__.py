"""The demonstration: a small causal transformer trained by AdamW and by RPT, side by side.

`python -m rpt demo` runs it; `rpt.demo.train.train` is the loop for use in scripts.
"""
