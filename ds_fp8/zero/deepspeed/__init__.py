"""The only files that use DeepSpeed's private names. versions.py collects them from here and checks them."""
