"""Reports: the record of a decision, and its prices, as text, JSON and HTML.

May import the optimiser and the folders below. Before: a `Result` of the optimiser. After: a
`Report`.

    report = make_report(result, optimiser)
    str(report); report.to_json(); report.to_html()
"""
