"""Tables in and out of a run: Parquet, CSV, JSON and saved Hugging Face datasets."""
