// Sorting of table rows by a column, under the names that asv's pages call it by.
(function ($) {
    "use strict";

    var comparers = {
        string: function (a, b) { return a.localeCompare(b); },
        float: function (a, b) { return parseFloat(a) - parseFloat(b); }
    };

    function key(row, column) {
        var cell = $(row).children().eq(column);
        var given = cell.attr("data-sort-value");
        return given === undefined ? cell.text() : given;
    }

    $.fn.stupidtable = function (more) {
        return this.each(function () {
            var table = $(this), known = $.extend({}, comparers, more);
            table.data("comparers", known);
            table.on("click", "thead th[data-sort]", function () { $(this).stupidsort(); });
        });
    };

    $.fn.stupidsort = function (wanted) {
        return this.each(function () {
            var head = $(this), table = head.closest("table"), column = head.index();
            var compare = table.data("comparers")[head.attr("data-sort")];
            var direction = wanted || (head.data("sorted") === "asc" ? "desc" : "asc");
            var sign = direction === "asc" ? 1 : -1;
            var rows = table.children("tbody").children("tr").get();
            rows.sort(function (a, b) { return sign * compare(key(a, column), key(b, column)); });
            table.children("tbody").append(rows);
            head.siblings().removeData("sorted");
            head.data("sorted", direction);
            table.trigger("aftertablesort", { column: column, direction: direction });
        });
    };
}(jQuery));
