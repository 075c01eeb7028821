"""The jobs a person runs: each composes techniques on real data and models, and leaves a record and a page."""
