"""Hetis"""
