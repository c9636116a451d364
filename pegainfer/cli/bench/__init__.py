"""Benchmark commands: a load generator for any OpenAI-compatible server, offline measurements, start-up."""
