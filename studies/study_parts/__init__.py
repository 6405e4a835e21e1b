"""The study of a model: what is measured, how it is run, and how it is shown."""
