"""Classifiers and reward models: their rules, their data, their network, their scores."""
