"""Ordered ratings whose noise and cut points belong to rows and columns (Houlsby 2014, chapter 7)."""
