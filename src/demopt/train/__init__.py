"""`demopt train`: from text to a trained model, with the workers of one machine or under torchrun.

Its modules, each of which imports only later ones: launch, worker, loop, checkpoint, report, screen, method, data,
model, team, out, config. runs/ is for `--run`: workers that come and go, through a folder. Importing this package does
not import the libraries that training needs.
"""
