"""Context parallelism: ranks that share each sequence."""
