"""Tables as input and output of a run: Parquet, CSV, JSON and saved Hugging Face datasets."""
