"""The order of examples, packing, collate functions, loaders and streams."""
