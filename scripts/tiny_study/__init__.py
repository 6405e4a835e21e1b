"""The study of the embedded model: what is measured, how it is run, and how it is shown."""
