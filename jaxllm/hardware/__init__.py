"""Devices: published specifications, compile targets, and detection of the attached devices."""
