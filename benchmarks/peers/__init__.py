"""Thin adaptors: the example-weight problem, the way each peer's own documentation writes it.

Each module has ``prepare(task) -> run``; ``run()`` does one hypergradient and returns the gradient for the example
weights. What a peer needs before its first step (a module, an engine) is built by ``prepare`` and is not timed.

Peers and how to install them beside the library (none pulls torchvision this way)::

    pip install -e '.[bench]'                                # higher 0.2.1, torchopt 0.7.3 with optree and graphviz
    pip install 'pip<24.1' && pip install --no-deps betty-ml==0.1.1    # newer pip refuses its metadata
"""
