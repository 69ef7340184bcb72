"""One command per claim: each measures, prints a table and writes JSON with its provenance under benchmarks/results.

Run one as `python -m benchmarks.NAME`; `headrace bench` lists them. What several commands share is in benchmarks.rig.
"""
