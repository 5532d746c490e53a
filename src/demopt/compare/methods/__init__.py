"""Each way to train data-parallel: a class with the interface of `simulate.method.Method`."""
