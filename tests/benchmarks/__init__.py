"""Benchmarks: ``make bench``, or ``python -m tests.benchmarks data_parallel`` for one of them.

They measure ratios, alternating in one run, because machines are noisy. Nothing here is a test.
"""
