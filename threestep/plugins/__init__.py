"""Optional features, each in a folder that can be deleted: training/utils/plugins/registry.py finds them."""
