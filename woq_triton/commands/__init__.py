"""The subcommands of `woq-triton`, one file each; `woq_triton.cli` lists them."""
