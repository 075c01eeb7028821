"""Which rows to train on: a choice by metagradients beside the choices that cost less, at equal rows and steps."""
