"""What layers and storages share: a batch's padding, RoPE at the first tokens of groups, slots of static layers."""
