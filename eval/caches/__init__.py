"""Caches under test: ours, peers, and one prefill that fills them all."""
