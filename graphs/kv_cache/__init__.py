"""The keys and values of all slots: made, copied, read and written."""
