"""The compared methods: each is a class with the interface of `simulate.method.Method`."""
