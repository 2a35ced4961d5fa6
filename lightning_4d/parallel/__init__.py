"""The mechanisms of parallel training: they know mesh axes and modules, never Lightning."""
