"""State that layers and storages share: padding of a batch, RoPE of groups, slots of static layers."""
