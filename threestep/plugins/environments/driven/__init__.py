"""Environments that drive the model themselves: they send it requests in OpenAI's form, and rollouts answer these.

Serves `--environment verifiers:NAME`, which loads `verifiers` by its name, and agents of users, whose files import
`driven`.
"""
