"""Adapters as PEFT saves them, and how a request names one."""
