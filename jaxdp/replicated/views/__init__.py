"""Views into a step: what ran when and where, what it held, which layer, which NaN.

They watch the stages, or run them once more, and change nothing.
"""
