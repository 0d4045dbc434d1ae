"""Run a real model on local ranks and measure it dense and quantized: the work of `woq-triton generate`."""
