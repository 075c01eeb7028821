"""Thin adaptors: the problem of a benchmark, the way each peer's own documentation writes it.

Those of the example-weight problem have ``prepare(task) -> run``; ``run()`` does one hypergradient and returns the
gradient for the example weights. What a peer needs before its first step (a module, an engine) is built by ``prepare``
and is not timed.

Peers and how to install them beside the library (none pulls torchvision this way)::

    pip install -e '.[bench]'                                # higher 0.2.1, torchopt 0.7.3 with optree and graphviz
    pip install 'pip<24.1' && pip install --no-deps betty-ml==0.1.1    # newer pip refuses its metadata

``deepspeed_run`` is the one of ``benchmarks.network``, whose ranks run it in an environment of its own::

    python -m venv deepspeed-env
    deepspeed-env/bin/pip install -c constraints.txt torch numpy safetensors rich tyro matplotlib jinja2
    DS_BUILD_OPS=0 deepspeed-env/bin/pip install -c constraints.txt deepspeed==0.19.8
    python -m benchmarks.network.sweep --arms rivals --python deepspeed-env/bin/python

mergekit is the one of ``benchmarks.valley.mergekit_check``, which runs it as a program of its own::

    python -m venv mergekit-env
    mergekit-env/bin/pip install -c constraints.txt torch numpy safetensors rich tyro matplotlib jinja2 mergekit==0.1.5
    python -m benchmarks.valley.mergekit_check --python mergekit-env/bin/python

bergson is the one of ``benchmarks.attribution_peers``, whose measurements run in an environment of its own::

    python -m venv bergson-env
    bergson-env/bin/pip install -c constraints.txt torch numpy safetensors rich tyro matplotlib jinja2 transformers
    bergson-env/bin/pip install -c constraints.txt accelerate datasets peft bitsandbytes
    bergson-env/bin/pip install --no-deps bergson==2.5.1 torchopt==0.7.3 optree graphviz jaxtyping wadler_lindig
    bergson-env/bin/pip install --no-deps natsort petname simple-parsing docstring-parser ml_dtypes
    python -m benchmarks.attribution_peers --python bergson-env/bin/python
"""
