"""`demopt eval`: what a trained model can do: tasks of lm-eval, and its loss on a text.

    command  the flags              loaded  the model in a folder
    tasks    scores of lm-eval      text    nats a token, bits a byte
    report   table and JSON

Importing this package does not import the libraries that evaluating needs.
"""
