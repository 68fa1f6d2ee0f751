"""Aladdin"""
