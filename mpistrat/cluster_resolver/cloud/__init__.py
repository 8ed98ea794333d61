"""Resolvers for clouds and Kubernetes."""
