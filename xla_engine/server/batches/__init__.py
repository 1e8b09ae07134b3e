"""`/v1/files` and `/v1/batches`: files of requests that run when no other request needs the slot."""
