"""The steps of loading a model: each looks at one thing, and refuses with one sentence."""
