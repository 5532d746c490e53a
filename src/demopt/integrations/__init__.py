"""demopt in other frameworks: one module each, which imports its framework alone. Recipes: docs/integrations.md."""
