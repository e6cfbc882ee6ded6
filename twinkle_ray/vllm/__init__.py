"""The only code that imports vllm."""
