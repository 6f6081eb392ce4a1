"""What a program talks to: one small protocol, and an implementation for each kind of service."""

from __future__ import annotations
