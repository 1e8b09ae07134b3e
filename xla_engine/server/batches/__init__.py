"""`/v1/files` and `/v1/batches`: files of requests that run when no interactive request needs the slot."""
